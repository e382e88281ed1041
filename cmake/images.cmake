# Device code inside the library. clang compiles src/device/cuda/code/kernels.cu to PTX once, which drivers compile for
# the GPU that is there. ptxas makes machine code of the PTX for each architecture beforehand. All of it becomes arrays
# of bytes in place of src/device/cuda/driver/images.c, which has none. CMake packs them as xz files (driver/unpack.h).
# nvcc's own front end (13.0) does not compile the source: it takes neither C11's _Static_assert nor a pragma that marks
# all functions of a file as a device's.
#
# HALFSTEP_CUDA=AUTO makes what the machine has the tools for, and downloads nothing; builds with tests have none. ON
# requires clang, and takes ptxas from the Python index. Either says in one line what was made by which tool.
#
#   cmake -D PACK=file -P images.cmake                                       writes file.xz
#   cmake -D OUTPUT=file.c -D "IMAGES=compute=file;..." -P images.cmake      writes the table of packed files

set(images_script ${CMAKE_CURRENT_LIST_FILE})

# Finds clang with a back end for GPUs.
function(halfstep_find_clang)
  find_program(HALFSTEP_CLANG clang DOC "Compiler of device code")
  if(HALFSTEP_CLANG)
    execute_process(COMMAND ${HALFSTEP_CLANG} --print-targets OUTPUT_VARIABLE targets ERROR_QUIET)
    if(NOT targets MATCHES "nvptx64")
      set(HALFSTEP_CLANG "HALFSTEP_CLANG-NOTFOUND" CACHE FILEPATH "Compiler of device code" FORCE)
    endif()
  endif()
  mark_as_advanced(HALFSTEP_CLANG)
endfunction()

# Makes PTX of a source: what drivers compile, and tests translate. It is for the least compute capability. ccache keeps
# it, because clang takes a minute.
function(halfstep_ptx output source)
  find_program(HALFSTEP_CCACHE ccache DOC "Keeps what clang has compiled")
  mark_as_advanced(HALFSTEP_CCACHE)
  set(launcher "")
  if(HALFSTEP_CCACHE)
    set(launcher ${HALFSTEP_CCACHE})
  endif()
  set(file ${PROJECT_SOURCE_DIR}/cmake/device_code.options)
  file(STRINGS ${file} options)
  string(JOIN " " options ${options})
  separate_arguments(options UNIX_COMMAND "${options}")
  add_custom_command(OUTPUT ${output}
    COMMAND ${launcher} ${HALFSTEP_CLANG} ${options} -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
            -MD -MF ${output}.d -MT ${output} -S -o ${output} ${source}
    DEPENDS ${source} ${file} DEPFILE ${output}.d)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endfunction()

# Finds the assembler: the one that HALFSTEP_PTXAS names, that of the Python index (ON), or whichever is in the path.
# Its version has to know the architectures.
function(halfstep_find_ptxas)
  set(found "${HALFSTEP_PTXAS}")
  if(NOT DEFINED HALFSTEP_PTXAS)
    if(NOT HALFSTEP_CUDA STREQUAL AUTO)
      execute_process(COMMAND bash ${PROJECT_SOURCE_DIR}/scripts/ptxas.sh ${PROJECT_BINARY_DIR}/ptxas
        OUTPUT_VARIABLE found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    endif()
    if(NOT found)
      find_program(HALFSTEP_PTXAS_IN_PATH ptxas HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin DOC "Assembler of device code")
      mark_as_advanced(HALFSTEP_PTXAS_IN_PATH)
      set(found "${HALFSTEP_PTXAS_IN_PATH}")
    endif()
  endif()
  set(version 0)
  if(found)
    execute_process(COMMAND ${found} --version OUTPUT_VARIABLE text)
    string(REGEX MATCH "release ([0-9.]+)" text "${text}")
    set(version ${CMAKE_MATCH_1})
  endif()
  set(ptxas "${found}" PARENT_SCOPE)
  set(ptxas_version ${version} PARENT_SCOPE)
endfunction()

function(halfstep_device_images result)
  # GPUs of 8.6 and 8.9 run the code of 8.0.
  set(HALFSTEP_CUDA_ARCHITECTURES 120 100 90 80 CACHE STRING "Architectures that get machine code, newest first")
  set(source ${PROJECT_SOURCE_DIR}/src/device/cuda/code/kernels.cu)
  set(output ${PROJECT_BINARY_DIR}/cuda_images.c)
  set(images "")
  set(files "")
  set(${result} ${PROJECT_SOURCE_DIR}/src/device/cuda/driver/images.c PARENT_SCOPE)
  if(HALFSTEP_CUDA STREQUAL AUTO AND HALFSTEP_TESTS)
    message(STATUS "Device code for GPUs: none, because this build has tests (-DHALFSTEP_CUDA=ON makes it)")
  elseif(HALFSTEP_CUDA)
    halfstep_find_clang()
    if(NOT HALFSTEP_CLANG)
      if(NOT HALFSTEP_CUDA STREQUAL AUTO)
        message(FATAL_ERROR "HALFSTEP_CUDA=${HALFSTEP_CUDA}, but no clang that compiles for nvptx64 was found; install clang")
      endif()
      message(STATUS "Device code for GPUs: none, because no clang that compiles for nvptx64 was found")
      return()
    endif()
    halfstep_find_ptxas()
    set(by "Device code for GPUs: PTX by ${HALFSTEP_CLANG}")
    # Drivers of CUDA 12 do not load what ptxas 13 makes.
    set(machine_code FALSE)
    if(ptxas_version VERSION_LESS 12.8)
      message(STATUS "${by}; no machine code, because no ptxas of 12.8 or newer was found: drivers compile the PTX at the first use")
    elseif(ptxas_version VERSION_LESS 13 OR NOT HALFSTEP_CUDA STREQUAL AUTO)
      set(machine_code TRUE)
      message(STATUS "${by}, machine code by ${ptxas} ${ptxas_version}")
    else()
      message(STATUS "${by}; no machine code, because drivers of CUDA 12 do not load that of ${ptxas} ${ptxas_version}: drivers compile the PTX at the first use (-DHALFSTEP_CUDA=ON fetches ptxas 12.9)")
    endif()
    set(ptx ${PROJECT_BINARY_DIR}/kernels.ptx)
    halfstep_ptx(${ptx} ${source})
    add_custom_command(OUTPUT ${ptx}.xz COMMAND ${CMAKE_COMMAND} -D PACK=${ptx} -P ${images_script} DEPENDS ${ptx} ${images_script})
    if(machine_code)
      foreach(architecture IN LISTS HALFSTEP_CUDA_ARCHITECTURES)
        set(cubin ${PROJECT_BINARY_DIR}/kernels.sm_${architecture}.cubin)
        add_custom_command(OUTPUT ${cubin}.xz BYPRODUCTS ${cubin}
          COMMAND ${ptxas} -arch=sm_${architecture} --fmad=false -o ${cubin} ${ptx}
          COMMAND ${CMAKE_COMMAND} -D PACK=${cubin} -P ${images_script}
          DEPENDS ${ptx} ${images_script})
        list(APPEND images ${architecture}=${cubin})
        list(APPEND files ${cubin}.xz)
      endforeach()
    endif()
    list(APPEND images 0=${ptx})
    list(APPEND files ${ptx}.xz)
    add_custom_command(OUTPUT ${output} COMMAND ${CMAKE_COMMAND} -D OUTPUT=${output} -D "IMAGES=${images}" -P ${images_script}
      DEPENDS ${files} ${images_script} VERBATIM)
    set(${result} ${output} PARENT_SCOPE)
  endif()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE AND PACK)
  file(ARCHIVE_CREATE OUTPUT "${PACK}.xz" PATHS "${PACK}" FORMAT raw COMPRESSION XZ)
elseif(CMAKE_SCRIPT_MODE_FILE)
  set(arrays "")
  set(rows "")
  set(code "")
  foreach(image IN LISTS IMAGES)
    string(REGEX MATCH "^([0-9]+)=(.*)$" image "${image}")
    set(compute ${CMAKE_MATCH_1})
    set(file "${CMAKE_MATCH_2}")
    if(compute)
      string(REGEX REPLACE "(.)$" ".\\1 " name ${compute})
    else()
      set(name "PTX ")
    endif()
    string(APPEND code "${name}")
    file(SIZE "${file}" bytes)
    file(READ "${file}.xz" data HEX)
    # A string, because compilers read it in a twentieth of the time of a list of numbers.
    string(REGEX REPLACE "(..)" "\\\\x\\1" data "${data}")
    string(APPEND arrays "static const unsigned char image_${compute}[] = \"${data}\";\n")
    string(APPEND rows "    {${compute}, image_${compute}, ${bytes}, sizeof image_${compute} - 1},\n")
  endforeach()
  string(STRIP "${code}" code)
  set(text "PTX, of which drivers make code for every GPU of compute capability 8.0 or higher")
  if(code MATCHES "^(.*) PTX$")
    string(REPLACE " " ", " names "${CMAKE_MATCH_1}")
    set(text "machine code for compute capability ${names} (each with later minor numbers); PTX for all others from 8.0 on")
  endif()
  file(WRITE "${OUTPUT}" "#include \"device/cuda/driver/images.h\"\n${arrays}const struct hstep_cuda_image hstep_cuda_images[] = {\n${rows}    {0, 0, 0, 0}};\nconst char hstep_cuda_code[] = \"${code}\";\nconst char hstep_cuda_code_text[] = \"${text}\";\n")
endif()
